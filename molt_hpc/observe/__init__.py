"""What a run shows: metrics, progress, reports."""
