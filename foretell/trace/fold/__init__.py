"""Repeats: `blocks` finds equal pieces of a module, `repeats` stores equal stretches of ops once, `deep` traces a deep stack from shallow ones,
which `extend` lengthens; `recompute` has blocks computed again in backward."""
