"""The parts an ejected script is made of: plain Python that is read as text and never runs as part of foretell.

A statement whose first line ends with `# if: NAME` is written only for plans of which that is true. Values of the
constants in `settings` are the plan's. Imports between the parts are left out: in the script they are one file.
"""
