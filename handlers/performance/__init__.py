"""What a handler may switch on to be faster: precision, folding, compilation, graphs, stages."""
