"""Where tokens, caches and weights live: token ranges, layouts and collectives. Empty in this version."""
