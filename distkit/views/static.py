def to_svg(picture): return ""
