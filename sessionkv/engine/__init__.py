"""The engine: scheduler, plans, runners, movers and the step loop."""
