"""Graphs: neighbourhoods, mixed-integer programs, formulas."""
