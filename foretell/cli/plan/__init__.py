"""`foretell plan`, and what is done with a plan file: show, eject, export."""
