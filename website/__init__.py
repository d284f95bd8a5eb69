"""How is the site made of docs/? What mkdocs.yml loads."""
