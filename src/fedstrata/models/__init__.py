"""What a model is made of: strata, stages, norms and layouts; the zoo; what it costs and what it sees."""
