"""Calibration text, pseudo-decode and its metrics."""
