// The account page: focus a newly created secret.
document.getElementById("secret-text")?.focus();
