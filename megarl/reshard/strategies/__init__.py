"""The weight-sync strategies: `gather_hf`, `micro_dp`, `exact` and HybridFlow's baselines."""
