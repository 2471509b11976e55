"""Measuring: workloads, targets, records, statistics, sweeps, figures, and the command line over them."""
