"""Language models: decoders, encoders and recurrent ones, how they are lengthened or tuned, and replays packed as text is."""
