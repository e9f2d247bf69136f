"""The PS process around a served fleet: operators, jobs."""
