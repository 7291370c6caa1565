"""Random small models out of ordinary and hostile pieces, trained plainly and under Pooch."""
