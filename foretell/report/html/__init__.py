"""One HTML file: `data` is read, `detail` predicted anew, `sections`, `figures` and `summary` make the `page`."""
