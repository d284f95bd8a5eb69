"""Which terms does the whole code share?

- `types`: what travels between server and clients (assignments, updates), strata and examples; plain data.
- `technique`: what a technique may see and do; `method`: how techniques go together.
- `spec`: names with arguments, `dirichlet(alpha=0.1)`; `optim`: optimisers and schedules by such names.
- `tensors`: arithmetic on named tensors; `rng`: seeds; `text`: numbers as people read them; `lazy`: torch when needed.
"""
