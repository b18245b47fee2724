"""Serving foretold and planned: one layout, the room there is for it, a search, other engines."""
