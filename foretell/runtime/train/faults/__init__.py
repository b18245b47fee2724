"""What a run does when a step goes wrong: numbers that are bad, memory that runs out, code that raises, a model that changes."""
