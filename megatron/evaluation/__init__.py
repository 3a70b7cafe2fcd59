"""How good a trained model is: perplexity, LAMBADA, multiple choice, and EleutherAI's harness. Importing it loads
nothing."""
