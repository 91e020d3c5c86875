// The person's page: a new secret is looked at first.
document.getElementById("secret-text")?.focus();
