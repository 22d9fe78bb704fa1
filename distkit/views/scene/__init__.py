"""The parts that all pictures share: SVG, text tables, colours, units, places."""
