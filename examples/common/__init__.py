"""What the run_*.py scripts share: arguments, data, models and peers, metrics, the Trainer, records of results."""
