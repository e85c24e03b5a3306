module csi-registrar/internal/e2e/packaging

go 1.26.0

require csi-registrar/internal/e2e/system v0.0.0

replace csi-registrar/internal/e2e/system => ../system
