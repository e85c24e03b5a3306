module csi-registrar/internal/e2e/system

go 1.26.0
