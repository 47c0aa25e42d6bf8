"""What is recommended is measured again on fresh servers, until a verdict can be given."""
