"""What everything stands on: units, errors, messages, plugins, native sources. It imports nothing else of Pooch."""
