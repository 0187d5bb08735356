"""What will fit, computed from geometry before anything runs; no torch."""
