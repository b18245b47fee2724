"""Devices of several kinds in one plan: `pipeline` shares layers by speed and memory, `place` puts ranks on devices, `polish` makes last changes."""
