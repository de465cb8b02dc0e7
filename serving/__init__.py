"""Online serving of the model (engine, scheduler, HTTP server): to come."""
