"""How to serve a model on some devices so that answers keep their limits: `find`."""
