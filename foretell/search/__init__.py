"""The search room: propose plans, cost them, keep the best."""
