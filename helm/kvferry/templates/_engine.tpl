{{- define "kvferry.engineContainer" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: vllm
  image: {{ include "kvferry.image" (dict "root" . "image" .Values.engine.image) }}
  imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
  command: {{ toJson .Values.engine.command }}
  args:
    {{- include "kvferry.engineArgs" . | nindent 4 }}
  env:
    {{- include "kvferry.engineEnv" . | nindent 4 }}
  ports:
    - name: http
      containerPort: {{ int64 .Values.engine.port }}
  startupProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ div (int64 .Values.engine.startupSecondsMax) 10 }}
  readinessProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    timeoutSeconds: 5
  livenessProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 6
  lifecycle:
    # Endpoints forget the pod meanwhile; then vLLM ends its running requests.
    preStop:
      sleep:
        seconds: {{ int64 .Values.engine.preStopSleepSeconds }}
  resources:
    {{- include "kvferry.engineResources" . | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: {{ .Values.engine.readOnlyRootFilesystem }}
    capabilities:
      drop: [ALL]
  volumeMounts:
    - name: run
      mountPath: {{ include "kvferry.mountDir" . }}
    - name: engine-shm
      mountPath: /dev/shm
    - name: engine-tmp
      mountPath: /tmp
    - name: models
      mountPath: {{ .Values.engine.models.mountPath }}
    {{- if eq .Values.connector.source "copy" }}
    - name: connector
      mountPath: {{ include "kvferry.connectorDir" . }}
      readOnly: true
    {{- end }}
    {{- with .Values.engine.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "kvferry.engineArgs" -}}
- {{ required "model: name the model to serve, for example --set model=Qwen/Qwen3-0.6B" .Values.model | quote }}
- --port={{ int64 .Values.engine.port }}
- --tensor-parallel-size={{ int64 .Values.engine.tensorParallelSize }}
- --pipeline-parallel-size={{ int64 .Values.engine.pipelineParallelSize }}
- --shutdown-timeout={{ int64 .Values.engine.shutdownTimeoutSeconds }}
- --kv-transfer-config
- {{ include "kvferry.transferConfig" . | quote }}
{{- with .Values.engine.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvferry.engineEnv" -}}
{{- /* A uid without an entry in the image's passwd has no home and no name. */ -}}
- name: HOME
  value: /tmp
- name: USER
  value: kvferry
- name: HF_HOME
  value: {{ .Values.engine.models.mountPath }}
{{- if eq .Values.connector.source "copy" }}
- name: PYTHONPATH
  value: {{ include "kvferry.connectorDir" . }}
{{- end }}
{{- if eq .Values.gpu.access "none" }}
- name: VLLM_CPU_KVCACHE_SPACE
  value: {{ int64 .Values.engine.cpuKvCacheGiB | quote }}
{{- end }}
{{- with .Values.engine.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.engine.hfToken.key }}
{{- end }}
{{- with .Values.engine.apiKey.existingSecret }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.engine.apiKey.key }}
{{- end }}
{{- with .Values.engine.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Copies one pure-Python folder: engine and sidecar then always speak one protocol. */ -}}
{{- define "kvferry.connectorContainer" -}}
- name: connector
  image: {{ include "kvferry.image" (dict "root" . "image" .Values.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [cp, -r, /opt/kvferry/kvferry_connector, {{ include "kvferry.connectorDir" . }}/]
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 64Mi}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
  volumeMounts:
    - name: connector
      mountPath: {{ include "kvferry.connectorDir" . }}
{{- end }}

{{- define "kvferry.engineVolumes" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: engine-shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $sizes.engineShmMi }}Mi
- name: engine-tmp
  emptyDir: {}
- name: models
  {{- if .Values.engine.models.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.engine.models.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.engine.models.size }}
  {{- end }}
{{- if eq .Values.connector.source "copy" }}
- name: connector
  emptyDir:
    sizeLimit: 16Mi
{{- end }}
{{- with .Values.engine.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
