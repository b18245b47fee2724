"""Commands that run something: run, verify, watch, box, demo, supervise, chaos, ckpt."""
