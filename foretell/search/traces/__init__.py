"""The traces that plans are costed from: `needed` asks for them, `split` traces one rank's part, `followed` and `scripted` are those of a script."""
