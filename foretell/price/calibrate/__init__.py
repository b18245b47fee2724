"""From measured rows to a machine: `fit` a probe's, `corrections` from runs, `kin` where another device stands in."""
