"""Building blocks of all pictures: marks, painters, SVG, text tables, colours."""
