"""How well models order pairs, per client and over clients."""
