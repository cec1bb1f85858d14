"""What a model version learns from the batches that ran: costs, and the sizes that pay."""
