"""Commands about machines: probe, hardware, doctor."""
