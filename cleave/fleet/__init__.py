"""Interface through which training code runs GEMMs on a fleet of devices."""
