"""`foretell tune`: what is better measured than believed."""
