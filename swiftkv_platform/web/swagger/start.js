// Swagger UI over the document beside this page, whatever prefix both are served under.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null, // its default sends the document's address to another host
});
