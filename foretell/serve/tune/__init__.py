"""Settings of a server measured: `trial` starts one and sends it a load, `table` keeps what was measured."""
