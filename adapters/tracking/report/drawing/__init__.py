"""HTML and SVG: escaped markup, charts and the style of a page."""
