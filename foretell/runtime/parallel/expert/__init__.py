"""Expert parallelism: `experts` lie on several data ranks, rows travel to them and back (`exchange`)."""
