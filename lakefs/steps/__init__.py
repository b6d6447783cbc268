"""Operations as generators: effects, tickets, the pipeline of requests in flight."""
