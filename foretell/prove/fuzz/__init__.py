"""Generated models: valid op graphs from inferred shape rules, each traced, measured and composed."""
