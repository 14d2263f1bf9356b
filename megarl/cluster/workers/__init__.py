"""Worker processes: how they are hosted, called as groups, watched for failures and stragglers."""
