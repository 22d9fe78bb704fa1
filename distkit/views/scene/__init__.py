"""Building blocks of all pictures: marks, renderers, SVG, text tables, colors."""
