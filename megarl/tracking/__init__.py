"""What a run records: metrics, progress lines, step timings, heartbeat, startup report, rollout log, summary."""
