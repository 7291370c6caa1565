"""Networks that only the published experiments need, one file each."""
