"""Files that were changed by chance, in their structure and in their bytes, and what reading them comes to."""
