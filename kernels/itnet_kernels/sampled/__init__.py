"""The sum over listed keys: edges, Monte Carlo samples, anchors."""
